"""What a program needs of the machine it runs on: flags, errors, files, signals, other processes, devices."""
