"""The disk that a partitioning takes, exactly and by a quick estimate, and the holder of each file."""
