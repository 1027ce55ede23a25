# Three images, chosen with --target: agent (the default) for a sidecar, init for the init
# container that needs the tools of iptables, and discovery for the control plane. `make image`
# builds all three and passes VERSION.

# Without `make image` the images say that they are development builds.
ARG VERSION=devel

FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# The same flags as in the Makefile, which gives the reason for the tag.
RUN CGO_ENABLED=0 go build -trimpath -tags grpcnotrace -ldflags '-s -w' -o /out/ ./cmd/nametap ./cmd/nametap-discovery
RUN mkdir -p /out/state

FROM debian:12-slim AS init
ARG VERSION
LABEL org.opencontainers.image.version=$VERSION
RUN apt-get update \
 && apt-get install -y --no-install-recommends iptables \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /out/nametap /usr/local/bin/nametap
ENTRYPOINT ["/usr/local/bin/nametap"]
CMD ["capture", "apply"]

FROM scratch AS discovery
ARG VERSION
LABEL org.opencontainers.image.version=$VERSION
COPY --from=build /out/nametap-discovery /usr/local/bin/nametap-discovery
COPY --from=build --chown=1337:1337 /out/state /var/lib/nametap-discovery
USER 1337:1337
EXPOSE 15010/tcp 15012/tcp 15014/tcp
ENTRYPOINT ["/usr/local/bin/nametap-discovery"]

FROM scratch AS agent
ARG VERSION
LABEL org.opencontainers.image.version=$VERSION
# The root certificates for tls:// nameservers.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/nametap /usr/local/bin/nametap
COPY --from=build --chown=1337:1337 /out/state /var/lib/nametap
USER 1337:1337
EXPOSE 15053/udp 15053/tcp 15020/tcp
ENTRYPOINT ["/usr/local/bin/nametap"]
CMD ["agent"]
