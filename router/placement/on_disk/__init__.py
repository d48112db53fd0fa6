"""The files of a data directory, beside the record of destinations: stores' directories, the configuration in force,
the progress of a repartitioning, the mark of an import."""
