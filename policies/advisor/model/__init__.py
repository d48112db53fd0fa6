"""The disk that a partitioning takes, exactly and by a quick estimate, and the keeper of each file."""
