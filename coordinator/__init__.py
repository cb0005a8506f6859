"""The coordinator: owns sessions, runs the round loop between draft and target replicas, serves clients."""
