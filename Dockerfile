# The images of `make image`, built by an engine:
#
#   docker build --tag nametap:0.1.0 .
#   docker build --tag nametap-init:0.1.0 --target init .
#   docker build --tag nametap-discovery:0.1.0 --target discovery .
#
# Another version is set by --build-arg VERSION=0.2.0.
ARG VERSION=0.1.0

FROM golang:1.26-trixie AS build
WORKDIR /src
COPY go.mod go.sum ./
COPY tools/image/go.mod tools/image/go.sum tools/image/
RUN go mod download && go -C tools/image mod download
COPY . .
ARG VERSION
RUN make image-roots IMAGES="agent discovery" ARCHES="$(go env GOARCH)"

FROM build AS tools
ARG VERSION
RUN make image-roots IMAGES=init ARCHES="$(go env GOARCH)"

FROM scratch AS init
ARG VERSION
LABEL org.opencontainers.image.version=$VERSION
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY --from=tools /src/bin/roots/init /
ENTRYPOINT ["/usr/local/bin/nametap"]
CMD ["capture", "apply"]

FROM scratch AS discovery
ARG VERSION
LABEL org.opencontainers.image.version=$VERSION
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY --from=build /src/bin/roots/discovery /
USER 1337:1337
EXPOSE 15010/tcp 15012/tcp 15014/tcp
ENTRYPOINT ["/usr/local/bin/nametap-discovery"]

FROM scratch AS agent
ARG VERSION
LABEL org.opencontainers.image.version=$VERSION
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY --from=build /src/bin/roots/agent /
USER 1337:1337
EXPOSE 15053/udp 15053/tcp 15020/tcp
ENTRYPOINT ["/usr/local/bin/nametap"]
CMD ["agent"]
