"""The backend of `torch.compile`: Dynamo captures, and this package plans and runs."""
