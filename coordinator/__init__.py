"""The coordinator: owns sessions, runs rounds between draft and target replicas, and serves clients."""
