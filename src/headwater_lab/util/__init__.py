"""Folders and files that commands write, sections of users' YAML, workers, and the command line as a process."""
