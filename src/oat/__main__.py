from oat.cli import main

raise SystemExit(main())
