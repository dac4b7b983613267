from shoal.cli import run

run()
