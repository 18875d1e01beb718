"""A small server with the part of the Hugging Face hub's protocol that creating, uploading, and loading models need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, READER, EXPIRED = "hf_writer", "hf_reader", "hf_expired"


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        content = json.dumps([(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(self.files.items())])
        return hashlib.sha1(f"{len(self.messages)} {content}".encode()).hexdigest()

    def find_oid(self, name: str) -> str | None:
        if name not in self.files:
            return None
        facts = self.describe_file(name)
        return facts["lfs"]["oid"] if "lfs" in facts else facts["oid"]

    def describe_file(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        facts = {"size": len(data), "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
        if name in self.large:
            digest = hashlib.sha256(data).hexdigest()
            facts["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
        return facts


@dataclass
class Hub:
    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub, whose address is to be HF_ENDPOINT, with HF_HUB_DISABLE_XET=1, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int = 200, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        self.answer(status, {"error": message}, X_Error_Message=message, **({"X_Error_Code": code} if code else {}))

    def do_GET(self) -> None:
        self.handle_request()

    do_HEAD = do_POST = do_PUT = do_GET

    def handle_request(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == EXPIRED:  # over https, huggingface_hub reads this answer as that of a missing repository
            return self.refuse(401, "Invalid username or password.", "RepoNotFound")
        if token not in ("", TOKEN, READER):
            return self.refuse(401, "Invalid credentials in Authorization header")
        match self.command, path:
            case "PUT", ["objects", digest]:
                assert hashlib.sha256(body).hexdigest() == digest
                hub.objects[digest] = body
                return self.answer()
            case "POST", ["api", "validate-yaml"]:
                return self.answer(content={"errors": [], "warnings": []})
            case "POST", ["api", "repos", "create"]:
                return self.create(hub, token, json.loads(body))
            case _, ["api", "models", owner, name, *rest]:
                return self.ask(hub, f"{owner}/{name}", token, rest, body)
            case "POST", [owner, git, "info", "lfs", "objects", "batch"] if git.endswith(".git"):
                return self.prepare_large(hub, json.loads(body))
            case _, [owner, name, "resolve", _, *file]:
                return self.send_file(hub, f"{owner}/{name}", token, "/".join(file))
        self.refuse(404, "Not Found")

    def create(self, hub: Hub, token: str, content: dict[str, Any]) -> None:
        if token != TOKEN:
            return self.refuse(403, "You don't have the rights to create a model under this namespace")
        name = f"{content['organization'] or 'me'}/{content['name']}"
        if name in hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"})
        hub.repositories[name] = Repository(content.get("visibility") == "private" or content.get("private") is True)
        self.answer(content={"url": f"{hub.address}/{name}"})

    def find(self, hub: Hub, name: str, token: str) -> Repository | None:
        repository = hub.repositories.get(name)
        if repository is None or (repository.private and not token):
            self.refuse(404, "Repository not found", "RepoNotFound")
            return None
        return repository

    def ask(self, hub: Hub, name: str, token: str, rest: list[str], body: bytes) -> None:
        if (repository := self.find(hub, name, token)) is None:
            return None
        match rest:
            case [] | ["revision", _]:
                siblings = [
                    {"rfilename": file, "blobId": facts["oid"], **facts}
                    for file in repository.files
                    for facts in [repository.describe_file(file)]
                ]
                content = {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings}
                return self.answer(content=content)
            case ["preupload", _]:
                if token != TOKEN:
                    return self.refuse(403, "Forbidden")
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                        "oid": repository.find_oid(file["path"]),
                    }
                    for file in json.loads(body)["files"]
                ]
                return self.answer(content={"files": files})
            case ["commit", _]:
                return self.commit(hub, name, repository, token, body)
        self.refuse(404, "Not Found")

    def prepare_large(self, hub: Hub, content: dict[str, Any]) -> None:
        objects = [
            entry
            if entry["oid"] in hub.objects
            else entry | {"actions": {"upload": {"href": f"{hub.address}/objects/{entry['oid']}", "header": {}}}}
            for entry in content["objects"]
        ]
        self.answer(content={"transfer": "basic", "objects": objects})

    def commit(self, hub: Hub, name: str, repository: Repository, token: str, body: bytes) -> None:
        if token != TOKEN:
            return self.refuse(403, "Forbidden")
        header, *changes = (json.loads(line) for line in body.splitlines())
        if (parent := header["value"].get("parentCommit")) and parent != repository.sha:
            return self.refuse(412, "A commit has happened since. Please refresh and try again.")
        for change in changes:
            value = change["value"]
            if change["key"] == "lfsFile":
                repository.files[value["path"]] = hub.objects[value["oid"]]
                repository.large.add(value["path"])
            else:
                assert change["key"] == "file"
                repository.files[value["path"]] = base64.b64decode(value["content"])
        repository.messages.append(header["value"]["summary"])
        oid = repository.sha
        self.answer(content={"success": True, "commitOid": oid, "commitUrl": f"{hub.address}/{name}/commit/{oid}"})

    def send_file(self, hub: Hub, name: str, token: str, file: str) -> None:
        if (repository := self.find(hub, name, token)) is None:
            return
        if file not in repository.files:
            return self.refuse(404, "Entry not found", "EntryNotFound")
        etag = hashlib.sha256(repository.files[file]).hexdigest()
        self.answer(200, repository.files[file], ETag=f'"{etag}"', X_Repo_Commit=repository.sha)
