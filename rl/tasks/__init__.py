"""Tasks: a work directory, a request, hidden tests, and the rules by which a result is graded."""
