#!/usr/bin/env bash
# prefect 3.8.8 with the newest packages that it asks for: fastapi "<1.0.0,>=0.139.0" and sqlalchemy "<3.0.0,>=2.0".
# One would expect: `pip install prefect==3.8.8` works next year as it did on its day; if not, it says so when it starts.
# With fastapi 0.155 the server cannot be imported. With sqlalchemy 2.1 flows run, and deployments are made with their schedules:
# only the server's function that makes the scheduled runs fails, so that none is ever there.
# Seen: fastapi 0.154.0, sqlalchemy 2.0.57 -> 3 runs scheduled; sqlalchemy 2.1.9 -> InvalidRequestError; fastapi 0.155.0 -> TypeError.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/look.py" <<'PYTHON'
"""Make a deployment with a schedule, and its runs, by the functions of the server that do this."""
import asyncio, uuid


def in_one_line(step, error):
    print(f"  {step}: {type(error).__name__}: {str(error).splitlines()[0]}")


async def look():
    from prefect.server import models
    from prefect.server.database import provide_database_interface
    from prefect.server.schemas.core import Deployment, DeploymentSchedule, Flow
    from prefect.server.schemas.schedules import CronSchedule

    database = provide_database_interface()
    await database.create_db()
    nightly = DeploymentSchedule(deployment_id=uuid.uuid4(), schedule=CronSchedule(cron="0 22 * * *"), active=True)
    async with database.session_context(begin_transaction=True) as session:
        flow = await models.flows.create_flow(session=session, flow=Flow(name="train"))
        deployment = Deployment(name="nightly", flow_id=flow.id, schedules=[nightly])
        made = await models.deployments.create_deployment(session=session, deployment=deployment)
        print("  deployment made, schedules:", len(made.schedules))
    try:
        async with database.session_context(begin_transaction=True) as session:
            print("  runs scheduled:", len(await models.deployments.schedule_runs(session=session, deployment_id=made.id)))
    except Exception as error:
        in_one_line("runs scheduled", error)


try:
    import prefect.server.api.server
except TypeError as error:
    in_one_line("import of the server", error)
else:
    asyncio.run(look())
PYTHON
python3 -m venv "$work/venv"
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_LOGGING_LEVEL=CRITICAL
for pins in "fastapi==0.154.0 sqlalchemy==2.0.57" "fastapi==0.154.0 sqlalchemy==2.1.9" "fastapi==0.155.0 sqlalchemy==2.0.57"; do
  "$work/venv/bin/pip" install --quiet --disable-pip-version-check prefect==3.8.8 $pins
  echo "$pins" | tee -a "$work/seen"
  PREFECT_HOME=$(mktemp -d -p "$work") "$work/venv/bin/python" "$work/look.py" 2>"$work/log" | tee -a "$work/seen"
done
diff "$work/seen" - <<'EXPECTED'
fastapi==0.154.0 sqlalchemy==2.0.57
  deployment made, schedules: 1
  runs scheduled: 3
fastapi==0.154.0 sqlalchemy==2.1.9
  deployment made, schedules: 1
  runs scheduled: InvalidRequestError: Can't evaluate bulk DML statement; please supply a bulk_dml decorated function
fastapi==0.155.0 sqlalchemy==2.0.57
  import of the server: TypeError: Body() got an unexpected keyword argument 'min_items'
EXPECTED
