"""What docs/transactions.md promises over several stores: the log of decisions, prepare and vote, who resolves."""
