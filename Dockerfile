# The environment that requirements.lock pins, and the code; docs/howto/cluster.md says how to run it. Not built by any test.
# docker build --tag g2rpo .                           # for driver 580 or newer; torch brings CUDA's libraries
# docker build --build-arg TORCH=cu126 --tag g2rpo .   # for driver 525 or newer
# docker build --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --tag g2rpo .
ARG BASE=python:3.11.9-slim-bookworm@sha256:8fb099199b9f2d70342674bd9dbccd3ed03a258f26bbd1d556822c6dfc60c317
FROM ${BASE}
ARG UID=1000

# An image without Python gets its distribution's; git is DVC's
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git $(command -v python3 >/dev/null || echo python3 python3-venv) \
 && rm -rf /var/lib/apt/lists/* \
 && (getent passwd ${UID} >/dev/null || useradd --uid ${UID} --create-home g2rpo) \
 && install --directory --owner=${UID} /g2rpo /opt/g2rpo

USER ${UID}
WORKDIR /g2rpo
ENV PATH=/opt/g2rpo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DVC_NO_ANALYTICS=1 DO_NOT_TRACK=1

# The packages, each file with a hash of its lock, before the code: a change of the code installs none again
COPY --chown=${UID} requirements*.lock ./
COPY --chown=${UID} tools/__init__.py tools/environment.py tools/fit_torchvision.py tools/activate_environment.py tools/
COPY --chown=${UID} g2rpo_core/__init__.py g2rpo_core/
COPY --chown=${UID} g2rpo_core/numerics/__init__.py g2rpo_core/numerics/driver.py g2rpo_core/numerics/
COPY --chown=${UID} g2rpo_core/foundation/__init__.py g2rpo_core/foundation/texts.py g2rpo_core/foundation/
ARG TORCH=cu130
RUN python3 -m venv /opt/g2rpo \
 && TORCH=${TORCH} python3 -m tools.environment install /opt/g2rpo

COPY --chown=${UID} . .
RUN pip install --no-deps --no-build-isolation --editable .
CMD ["g2rpo", "doctor"]
