"""Many runs of one task: train, measure, record, clean up."""
