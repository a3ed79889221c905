"""Files of torch.save, read as data: no class is imported and no function is called."""
