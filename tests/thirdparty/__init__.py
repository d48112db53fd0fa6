"""A store of a third party, installed for the tests as any other would be, and its tests."""
