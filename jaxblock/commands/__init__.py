"""The commands of the command line, one a file; `jaxblock.cli` is their list."""
