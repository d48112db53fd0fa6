"""What a partitioning has on disk, exactly and by a quick estimate, and who keeps which file."""
