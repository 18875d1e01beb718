"""Output folders and files, sections of users' YAML, worker processes, and the command line as a process."""
