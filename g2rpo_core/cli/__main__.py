from g2rpo_core.cli.main import main

main()
