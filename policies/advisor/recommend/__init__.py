"""From a trace to a recommendation: the job, the answer in words, and the files that it is written to."""
