# Installation, packages, images and releases. The Makefile includes it.

# The name of the images. The version is that of the images and of what names them (injection, the chart, the
# manifests), of the packages, and the one that the programs print.
IMAGE    ?= nametap
VERSION  ?= 0.1.0
PREFIX   ?= /usr/local
# The two places where systemd looks for installed units.
LIBDIR   ?= $(if $(filter /usr,$(PREFIX)),/usr,/usr/local)/lib
# Where `make install` takes the agent from.
BIN      ?= bin
# What `make packages` and `make image` build. The time of the commit is the time of all files in
# them, so that equal sources give equal packages and images. An unpacked archive has none.
ARCHES   ?= amd64 arm64
FORMATS  ?= deb rpm
# The FIPS 140-3 module of Go that a release is built with, such as v1.0.0: make release FIPS=v1.0.0 VERSION=0.1.0-fips
FIPS     ?= off
SOURCE_DATE_EPOCH ?= $(shell tools/commit-time)
LINK     = -s -w -X github.com/nametap/nametap/internal/version.release=$(VERSION)
RELEASE  = LINK='$(LINK)' GO='$(GO)' TAGS='$(TAGS)' VERSION='$(VERSION)' ARCHES='$(ARCHES)' FORMATS='$(FORMATS)' FIPS='$(FIPS)' SOURCE_DATE_EPOCH='$(SOURCE_DATE_EPOCH)'

##@ install
.PHONY: manual install clean
manual: ## write the manual pages and the shell completion to bin/share
	@for command in nametap nametap-discovery; do rm -rf bin/share/$$command; \
	CGO_ENABLED=0 GOOS=$$($(GO) env GOHOSTOS) GOARCH=$$($(GO) env GOHOSTARCH) $(GO) run -trimpath -tags $(TAGS),manual -ldflags '$(LINK)' ./cmd/$$command bin/share/$$command || exit; done

# The sources of the binaries, including the commit.
SOURCES = go.mod go.sum $(wildcard .git/logs/HEAD) \
	$(shell find agent api cmd discovery dnsproxy egress examples inject internal iptables nds -type f ! -name '*_test.go' ! -path '*/testdata/*')

# Builds only if a source has changed. So root, who may have no Go, can install what a user
# has built.
bin/nametap: $(SOURCES)
	@$(HAS_GO)
	$(BUILD) ./cmd/nametap
	@touch $@

PAGE = bin/share/nametap/man/man1/nametap.1
$(PAGE): $(SOURCES)
	@$(HAS_GO)
	$(MAKE) manual
	@touch $@

HAS_GO = command -v $(GO) >/dev/null || { echo 'make: $@ is missing or older than the sources, and the command $(GO) is missing: run `make build manual` as a user with Go first' >&2; exit 1; }

install: $(BIN)/nametap $(PAGE) ## install the agent and its units for a VM, below DESTDIR
	install -D -m 755 '$(BIN)/nametap' '$(DESTDIR)$(PREFIX)/bin/nametap'
	install -D -m 644 deploy/systemd/nametap.socket   '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.socket'
	install -D -m 644 deploy/systemd/nametap.service  '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.service'
	install -D -m 644 deploy/systemd/nametap-rules.service '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-rules.service'
	install -D -m 644 deploy/systemd/nametap-captured.target '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-captured.target'
	install -D -m 755 deploy/systemd/back-off '$(DESTDIR)$(PREFIX)/libexec/nametap/back-off'
	install -D -m 644 deploy/systemd/nametap-resolved.socket   '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-resolved.socket'
	install -D -m 644 deploy/systemd/nametap-resolved@.service '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-resolved@.service'
	install -D -m 644 deploy/systemd/nametap-dns.network '$(DESTDIR)$(LIBDIR)/systemd/network/05-nametap-dns.network'
	install -D -m 644 deploy/systemd/nametap.preset '$(DESTDIR)$(LIBDIR)/systemd/system-preset/80-nametap.preset'
	tools/install-manual bin/share/nametap '$(DESTDIR)$(PREFIX)/share'
	sed -i 's,/usr/local/\(bin\|libexec\)/,$(PREFIX)/\1/,g' '$(DESTDIR)$(LIBDIR)/systemd/system/'nametap*.service
	install -D -m 644 deploy/systemd/nametap.sysusers '$(DESTDIR)$(LIBDIR)/sysusers.d/nametap.conf'
	install -D -m 644 deploy/systemd/nametap.tmpfiles '$(DESTDIR)$(LIBDIR)/tmpfiles.d/nametap.conf'
	test -e '$(DESTDIR)/etc/default/nametap' || \
	install -D -m 644 deploy/systemd/nametap.default  '$(DESTDIR)/etc/default/nametap'
	@echo 'Now edit /etc/default/nametap, then run: systemd-sysusers nametap.conf && systemd-tmpfiles --create nametap.conf && \'
	@echo '  systemctl daemon-reload && systemctl enable --now nametap.socket nametap.service'

clean: ## remove what was built
	rm -rf bin

##@ release
.PHONY: packages image image-roots image-check image-update image-test release reproducible release-test install-test sign verify vuln
packages: ## build deb and rpm with VERSION in bin/release (ARCHES, FORMATS)
	@$(RELEASE) tools/binaries
	@$(RELEASE) tools/packages

image: ## build the container images with VERSION as their tag in bin/images, without an engine
	@$(RELEASE) tools/binaries
	@$(RELEASE) IMAGE='$(IMAGE)' tools/images

image-roots: # write the files of IMAGES (agent, init, discovery) below bin/roots, for the Dockerfile
	@$(RELEASE) SOURCE_DATE_EPOCH='$(or $(SOURCE_DATE_EPOCH),0)' tools/binaries
	@$(RELEASE) SOURCE_DATE_EPOCH='$(or $(SOURCE_DATE_EPOCH),0)' tools/images $(IMAGES)

image-check: ## check that the init image has the current versions of its Debian packages
	tools/debian-packages --check tools/image/debian.list amd64 arm64

image-update: ## write the current versions of the init image's Debian packages
	tools/debian-packages --update tools/image/debian.list amd64 arm64

image-test: ## build the Dockerfile with an engine, compare with make image, and run the images (needs root)
	@tools/install-missing buildah debootstrap
	$(MACHINES) ./image $(ARGS)

release: ## build packages, images, chart, manifests, kubectl's plugin and their SHA256SUMS in bin/release
	@$(RELEASE) tools/binaries
	@$(RELEASE) tools/packages
	@$(RELEASE) tools/manifests
	@$(RELEASE) tools/plugin
	@$(RELEASE) IMAGE='$(IMAGE)' tools/images
	@$(RELEASE) tools/release-images
	@tools/sums bin/release

reproducible: ## build the release twice, in other directories and as other users, and compare
	@$(RELEASE) tools/reproducible

release-test: ## test bin/release, and the tools that make it (after make release)
	@tools/install-missing lintian rpm
	cd tools/image && $(GO) test ./... -count=1
	cd test/machines && VERSION='$(VERSION)' ARCHES='$(ARCHES)' $(GO) test ./release -count=1 -timeout 20m -v $(ARGS)

install-test: ## install bin/release: its packages on a Debian, its chart on a Kubernetes node (after make release; needs root)
	cd bin/release && sha256sum --check --quiet SHA256SUMS
	@tools/install-missing debootstrap systemd-nspawn ip conntrack dnsmasq containerd runc /usr/lib/cni/bridge iptables nsenter
	$(MACHINES) ./vm -run='^(TestDeb|TestRPM)$$' -vm.release='$(CURDIR)/bin/release' $(ARGS)
	$(MACHINES) ./node -node.release='$(CURDIR)/bin/release' $(ARGS)

sign: ## sign SHA256SUMS of bin/release with ssh-keygen (KEY=~/.ssh/id_ed25519)
	@tools/sign '$(KEY)' bin/release

verify: ## check the signature and the files of bin/release (KEY=release.pub)
	@tools/verify '$(KEY)' bin/release

vuln: ## look for known vulnerabilities that the programs reach (needs https://vuln.go.dev; GOVULNDB names a copy)
	@GO='$(GO)' tools/vuln

