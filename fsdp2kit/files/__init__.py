"""Files and texts that leave the process: replaced whole, read with one kind of error, and without secrets."""
