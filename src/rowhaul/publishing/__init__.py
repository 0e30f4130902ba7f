"""What `rowhaul train --publish` writes: a served folder, then what changed, while training goes on."""
