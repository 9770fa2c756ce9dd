"""What the doctor looks at, one module per subject: the method, the model, the questions, the search, a rehearsal."""
