"""python -m quantrules"""

from quantrules.cli import main

main()
