"""Many budgets of one model: predicted and measured curves of time against memory."""
