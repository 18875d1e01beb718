"""The rows of a recipe for torchtitan's trainer, in the same order as `headwater train` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from headwater.util.errors import HeadwaterError
from headwater_lab.data.base import Share
from headwater_lab.recipe.recipe_files import find_recipe, load_recipe


class RecipeLoader(BaseDataLoader):
    """The rows of a recipe's `data:`, a share for each data-parallel process. Resumes at the row where it was saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        recipe: str = ""
        """A recipe's file or name."""
        positions: bool = False
        """Return positions even for rows of a single document, because context parallelism needs them."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **unused: Any
    ) -> None:
        recipe = load_recipe(find_recipe(config.recipe))
        self.data, self.seed = recipe.data.build(), recipe.seed
        if seq_len != self.data.context:
            raise HeadwaterError(
                f"The recipe's rows have {self.data.context} tokens, not {seq_len}; change data.context in the recipe "
                "instead of training.seq_len."
            )
        self.rows, self.local = recipe.training.batch_size, local_batch_size
        if self.rows % (dp_world_size * local_batch_size):
            raise HeadwaterError(
                f"The recipe's batches of {self.rows} rows cannot be divided among {dp_world_size} processes of "
                f"{local_batch_size} rows each; change training.local_batch_size."
            )
        self.share, self.positions = Share(dp_rank, dp_world_size), config.positions
        self.batches = self.rows // dp_world_size // local_batch_size  # local ones in a batch of the recipe
        self.row = self.batch_index = 0  # first row of the recipe's batch, and its next local batch

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield ids, with positions where documents start inside a row, and labels: [rows of this process, T] each."""
        for batch in self.data.batches(self.seed, self.rows, self.row, self.share):
            if "document_starts" in batch:
                raise HeadwaterError(
                    "torchtitan's trainer does not support rows in which attention crosses document boundaries and "
                    "mechanisms do not; train this recipe with `headwater train`."
                )
            while self.batch_index < self.batches:
                rows = slice(self.batch_index * self.local, (self.batch_index + 1) * self.local)
                self.batch_index += 1
                ids = batch["input_ids"][rows]
                inputs = {"input": ids}
                if "position_ids" in batch:
                    inputs["positions"] = batch["position_ids"][rows]
                elif self.positions:
                    inputs["positions"] = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
                yield inputs, batch["shift_labels"][rows]
            self.row, self.batch_index = self.row + self.rows, 0

    def state_dict(self) -> dict[str, Any]:
        is_whole = self.batch_index == self.batches
        row, part = (self.row + self.rows, 0) if is_whole else (self.row, self.batch_index)
        return {"row": row, "part": part, "split": [self.share.world, self.local]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.row, self.batch_index = state_dict.get("row", 0), state_dict.get("part", 0)
        if self.batch_index and state_dict["split"] != [self.share.world, self.local]:
            world, local = state_dict["split"]
            raise HeadwaterError(
                f"The run was saved inside a batch, and resumes only with {world} data-parallel processes of {local} "
                "rows each; set training.local_batch_size to that."
            )


class NoTokenizer(BaseTokenizer):
    """A stand-in for torchtitan's tokenizer: a recipe's rows are already tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise HeadwaterError("A recipe's rows are already tokens; torchtitan has no tokenizer to encode text.")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise HeadwaterError(
            "torchtitan has no tokenizer for a recipe; decode tokens with the tokenizer of the recipe's data."
        )

    def get_vocab_size(self) -> int:
        return 0
