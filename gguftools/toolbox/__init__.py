"""What people do to model files besides running them: one file a job, as a function that returns what it found or did;
`gguftools/commands` prints it."""
