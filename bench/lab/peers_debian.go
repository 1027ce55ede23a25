package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
)

// findTool looks for a program of a Debian package, also in the directories of root's PATH.
func findTool(name, pkg string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin", "/usr/local/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no program %q; on Debian: apt-get install %s", name, pkg)
}

// toolVersion returns the first version number that a program prints, or an empty string.
func toolVersion(ctx context.Context, argv ...string) string {
	// Some programs print their version and exit with 1.
	text, _ := Output(ctx, argv...)
	return regexp.MustCompile(`\d+(\.\d+)+\S*\b`).FindString(text)
}

// hostsFile writes the hosts in the format of /etc/hosts.
func hostsFile(hosts []Host) []byte {
	var file []byte
	for _, h := range hosts {
		for _, ip := range h.ips {
			file = fmt.Appendf(file, "%s %s\n", ip, h.Name)
		}
	}
	return file
}

// prepareDnsmasq prepares dnsmasq with the hosts in a file.
func prepareDnsmasq(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	return l.dnsmasq(ctx, addr, "--no-resolv", "--local=/"+clusterDomain+"/")
}

// dnsmasq returns how to start dnsmasq with the hosts in a file, and more options.
func (l *Lab) dnsmasq(ctx context.Context, addr netip.AddrPort, options ...string) (Launch, error) {
	binary, err := findTool("dnsmasq", "dnsmasq-base")
	if err != nil {
		return Launch{}, err
	}
	me, err := user.Current()
	if err != nil {
		return Launch{}, fmt.Errorf("looking up the current user: %w", err)
	}
	hosts, err := l.Write("hosts", hostsFile(l.Services))
	return Launch{
		Argv: append([]string{
			binary, "--keep-in-foreground", "--conf-file=/dev/null", "--log-facility=-", "--pid-file=",
			"--user=" + me.Username, "--no-hosts", "--bind-interfaces",
			"--listen-address=" + addr.Addr().String(), fmt.Sprintf("--port=%d", addr.Port()),
			"--local-ttl=30", "--addn-hosts=" + hosts,
		}, options...),
		version: toolVersion(ctx, binary, "--version"),
	}, err
}

// prepareUnbound prepares unbound with the hosts as local data, and one thread.
func prepareUnbound(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	binary, err := findTool("unbound", "unbound")
	if err != nil {
		return Launch{}, err
	}
	var data bytes.Buffer
	fmt.Fprintf(&data, "  module-config: \"iterator\"\n  local-zone: \"%s.\" static\n", clusterDomain)
	l.localData(&data)
	path, err := l.unboundConfig(addr, data.String())
	return Launch{
		Argv:    []string{binary, "-d", "-c", path},
		version: toolVersion(ctx, binary, "-V"),
	}, err
}

// localData writes the hosts as unbound's local data.
func (l *Lab) localData(w io.Writer) {
	for _, h := range l.Services {
		for _, ip := range h.ips {
			fmt.Fprintf(w, "  local-data: \"%s. 30 IN A %s\"\n", h.Name, ip)
		}
	}
}

// unboundConfig writes a configuration for unbound with one thread and returns its path.
// body continues the server clause, and may add further clauses.
func (l *Lab) unboundConfig(addr netip.AddrPort, body string) (string, error) {
	return l.Write(fmt.Sprintf("unbound-%s-%d.conf", addr.Addr(), addr.Port()), fmt.Appendf(nil, `server:
  interface: %s@%d
  do-daemonize: no
  use-syslog: no
  verbosity: 0
  username: ""
  chroot: ""
  pidfile: ""
  directory: %q
  num-threads: 1
%sremote-control:
  control-enable: no
`, addr.Addr(), addr.Port(), l.Dir, body))
}

// prepareNSD prepares NSD with the hosts in one zone.
func prepareNSD(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	var zone bytes.Buffer
	fmt.Fprintf(&zone, "$ORIGIN %s.\n$TTL 30\n@ SOA ns hostmaster 1 3600 600 86400 30\n@ NS ns\nns A 127.0.0.1\n", clusterDomain)
	for _, h := range l.Services {
		for _, ip := range h.ips {
			fmt.Fprintf(&zone, "%s. A %s\n", h.Name, ip)
		}
	}
	binary, err := findTool("nsd", "nsd")
	if err != nil {
		return Launch{}, err
	}
	zoneFile, err := l.Write("zone", zone.Bytes())
	if err != nil {
		return Launch{}, err
	}
	config, err := l.Write(fmt.Sprintf("nsd-%d.conf", addr.Port()), fmt.Appendf(nil, `server:
  ip-address: %s@%d
  username: ""
  zonesdir: %q
  database: ""
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
`, addr.Addr(), addr.Port(), l.Dir, l.Dir, addr.Port(), clusterDomain, zoneFile))
	if err != nil {
		return Launch{}, err
	}
	if text, err := Output(ctx, filepath.Join(filepath.Dir(binary), "nsd-checkconf"), config); err != nil {
		return Launch{}, errors.Join(err, errors.New(text))
	}
	return Launch{
		Argv:    []string{binary, "-d", "-c", config},
		version: toolVersion(ctx, binary, "-v"),
	}, nil
}
