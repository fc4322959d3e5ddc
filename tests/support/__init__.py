"""What several test files share: groups, trainers, commands, a cluster. No test stands here."""
