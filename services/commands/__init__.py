"""The command line's subcommands, one family a file. What is heavy (torch, gRPC) is imported when a command runs."""
