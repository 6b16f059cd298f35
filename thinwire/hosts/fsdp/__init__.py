"""torch's FSDP2, with weights and gradients in a method's codecs."""
