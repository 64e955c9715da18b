"""`python -m wholestep` is the command `wholestep`."""

from wholestep.cli import main

main(prog_name="wholestep")
