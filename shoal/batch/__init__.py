"""Many lines into many files, at full throughput: what is done stays done, whatever ends the run."""
