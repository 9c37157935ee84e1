"""Who may speak to a process: TLS on its ports and channels, API keys, signed tokens. Knows no door and no engine."""
