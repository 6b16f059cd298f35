"""Second floor: tensors to flat spans and back. No communicator."""
