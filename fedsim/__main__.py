from fedsim.cli import main

main()
