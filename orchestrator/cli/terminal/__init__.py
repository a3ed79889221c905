"""Parts that all commands share: output, messages, exit codes, help, examples and proposals for completion."""
