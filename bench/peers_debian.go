package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
)

// findTool looks for a program of a Debian package, also where only root looks.
func findTool(name, pkg string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin", "/usr/local/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no program %q; on Debian: apt-get install %s", name, pkg)
}

// toolVersion is the first version number that a program prints, or "".
func toolVersion(ctx context.Context, argv ...string) string {
	// Some exit with 1 when asked for their version, and print it all the same.
	text, _ := output(ctx, argv...)
	return regexp.MustCompile(`\d+(\.\d+)+\S*\b`).FindString(text)
}

// hostsFile is the hosts in the form of /etc/hosts.
func hostsFile(hosts []host) []byte {
	var file []byte
	for _, h := range hosts {
		for _, ip := range h.ips {
			file = fmt.Appendf(file, "%s %s\n", ip, h.name)
		}
	}
	return file
}

// prepareDnsmasq has the hosts in a file.
func prepareDnsmasq(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := findTool("dnsmasq", "dnsmasq-base")
	if err != nil {
		return launch{}, err
	}
	me, err := user.Current()
	if err != nil {
		return launch{}, fmt.Errorf("asking for the own user: %w", err)
	}
	hosts, err := l.write("hosts", hostsFile(l.services))
	return launch{
		argv: []string{
			binary, "--keep-in-foreground", "--conf-file=/dev/null", "--log-facility=-", "--pid-file=",
			"--user=" + me.Username, "--no-resolv", "--no-hosts", "--bind-interfaces",
			"--listen-address=" + addr.Addr().String(), fmt.Sprintf("--port=%d", addr.Port()),
			"--local=/" + clusterDomain + "/", "--local-ttl=30", "--addn-hosts=" + hosts,
		},
		version: toolVersion(ctx, binary, "--version"),
	}, err
}

// prepareUnbound has the hosts as local data of one thread.
func prepareUnbound(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := findTool("unbound", "unbound")
	if err != nil {
		return launch{}, err
	}
	var config bytes.Buffer
	fmt.Fprintf(&config, `server:
  interface: %s@%d
  do-daemonize: no
  use-syslog: no
  verbosity: 0
  username: ""
  chroot: ""
  pidfile: ""
  directory: %q
  num-threads: 1
  module-config: "iterator"
  local-zone: "%s." static
`, addr.Addr(), addr.Port(), l.dir, clusterDomain)
	for _, h := range l.services {
		for _, ip := range h.ips {
			fmt.Fprintf(&config, "  local-data: \"%s. 30 IN A %s\"\n", h.name, ip)
		}
	}
	config.WriteString("remote-control:\n  control-enable: no\n")
	path, err := l.write(fmt.Sprintf("unbound-%d.conf", addr.Port()), config.Bytes())
	return launch{
		argv:    []string{binary, "-d", "-c", path},
		version: toolVersion(ctx, binary, "-V"),
	}, err
}

// prepareNSD has the hosts as one zone.
func prepareNSD(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := findTool("nsd", "nsd")
	if err != nil {
		return launch{}, err
	}
	var zone bytes.Buffer
	fmt.Fprintf(&zone, "$ORIGIN %s.\n$TTL 30\n@ SOA ns hostmaster 1 3600 600 86400 30\n@ NS ns\nns A 127.0.0.1\n", clusterDomain)
	for _, h := range l.services {
		for _, ip := range h.ips {
			fmt.Fprintf(&zone, "%s. A %s\n", h.name, ip)
		}
	}
	zoneFile, err := l.write("zone", zone.Bytes())
	if err != nil {
		return launch{}, err
	}
	config, err := l.write(fmt.Sprintf("nsd-%d.conf", addr.Port()), fmt.Appendf(nil, `server:
  ip-address: %s@%d
  username: ""
  zonesdir: %q
  xfrdir: %q
  xfrdfile: ""
  zonelistfile: "zone-%d.list"
  pidfile: ""
  server-count: 1
  rrl-ratelimit: 0
remote-control:
  control-enable: no
zone:
  name: %q
  zonefile: %q
`, addr.Addr(), addr.Port(), l.dir, l.dir, addr.Port(), clusterDomain, zoneFile))
	if err != nil {
		return launch{}, err
	}
	if text, err := output(ctx, filepath.Join(filepath.Dir(binary), "nsd-checkconf"), config); err != nil {
		return launch{}, errors.Join(err, errors.New(text))
	}
	return launch{
		argv:    []string{binary, "-d", "-c", config},
		version: toolVersion(ctx, binary, "-v"),
	}, nil
}
