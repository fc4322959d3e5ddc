"""What a run consists of, from its configuration to its directory."""
