package vm

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// Units are the units of nametap, as `systemctl stop` takes them.
func Units() []string { return []string{"nametap.socket", "nametap.service"} }

// Repository returns the directory of nametap's sources.
func Repository() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// Install installs nametap by `make install`, and writes its settings: the World's, and then
// settings, one NAME=value each. Nothing is started.
func (m *Machine) Install(settings ...string) {
	m.tb.Helper()
	m.InstallFrom(Repository())
	settings = append([]string{"NAMETAP_XDS_ADDR=" + Control, "NAMETAP_XDS_PLAINTEXT=true", "POD_NAMESPACE=shop"}, settings...)
	m.Write("/etc/default/nametap", strings.Join(settings, "\n")+"\n")
}

// InstallFrom runs `make install` in a directory, over what is installed.
func (m *Machine) InstallFrom(dir string) {
	m.tb.Helper()
	install := exec.CommandContext(m.tb.Context(), "make", "--silent", "--directory="+dir, "install",
		fmt.Sprintf("DESTDIR=/proc/%d/root", m.leader))
	output, err := install.CombinedOutput()
	if err != nil {
		m.tb.Fatalf("%s: %v\n%s", install, err, output)
	}
	_, m.setup, _ = strings.Cut(string(output), "then run: ")
}

// Start runs the commands that `make install` prints, and returns when the machine has names of
// the mesh.
func (m *Machine) Start() {
	m.tb.Helper()
	if m.setup == "" {
		m.tb.Fatal("`make install` did not print what to run")
	}
	m.Run("sh", "-euxc", m.setup)
	m.AwaitMesh()
}

// AwaitMesh returns when a program of the machine can look up [Mesh].
func (m *Machine) AwaitMesh() {
	m.tb.Helper()
	wait.Until(m.tb, "the machine can look up "+Mesh, func() bool { return m.Lookup(Mesh) == MeshIP })
}

// Captured reports whether the machine has rules of nametap.
func (m *Machine) Captured() bool {
	m.tb.Helper()
	return strings.Contains(m.Net.Rules(), "-j NAMETAP_OUTPUT")
}

// Lookup sends one query from the machine to the nameserver in its resolv.conf, and returns the
// addresses in the response, or the error.
func (m *Machine) Lookup(name string) string {
	m.tb.Helper()
	return m.LookupAt("udp", net.JoinHostPort(Named, "53"), name)
}

// LookupAt is Lookup with a nameserver, over "udp" or "tcp".
func (m *Machine) LookupAt(network, server, name string) string {
	m.tb.Helper()
	var conn *dns.Conn
	var err error
	m.Net.Run(func() { conn, err = dns.DialTimeout(network, server, lookupTimeout) })
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	client := dns.Client{Net: network, Timeout: lookupTimeout}
	reply, _, err := client.ExchangeWithConnContext(m.tb.Context(), new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), conn)
	if err != nil {
		return err.Error()
	}
	if reply.Rcode != dns.RcodeSuccess {
		return dns.RcodeToString[reply.Rcode]
	}
	var addresses []string
	for _, record := range reply.Answer {
		if a, ok := record.(*dns.A); ok {
			addresses = append(addresses, a.A.String())
		}
	}
	return strings.Join(addresses, " ")
}

// lookupTimeout is the timeout of a query in glibc's resolver.
const lookupTimeout = 5 * time.Second
