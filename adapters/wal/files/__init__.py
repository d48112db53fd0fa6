"""The files of a log: segments and the pool they come from, the reserve, the watermark, copies, the archive."""
