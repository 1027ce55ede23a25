package egress

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// Names and addresses.
const (
	gateway, gateway6 = "10.0.0.2", "2001:db8::2" // of the network, with the nameserver and the control plane
	statusAddr        = "127.0.0.1:15020"
	agentID           = 1337
	capNetAdmin       = 12

	database1, database2 = "mysql-1.example.com", "mysql-2.example.com"
	mail                 = "mail.example.com"
	siteA, siteB         = "a.apps.example.org", "b.apps.example.org"
)

// serviceEntries are the hosts of the mesh.
const serviceEntries = `
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: databases, namespace: shop}
spec:
  hosts: [mysql-1.example.com, mysql-2.example.com]
  resolution: DNS
  ports: [{number: 3306, name: sql, protocol: TCP}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: mail, namespace: shop}
spec:
  hosts: [mail.example.com]
  resolution: DNS
  ports: [{number: 25, name: smtp, protocol: TCP}]
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: apps, namespace: shop}
spec:
  hosts: ["*.apps.example.org"]
  resolution: DYNAMIC_DNS
  ports: [{number: 443, name: tls, protocol: TLS}, {number: 80, name: http, protocol: HTTP}]
`

// addresses are those of the servers in the network.
func addresses(name string) (v4, v6 string) {
	numbers := map[string]int{database1: 11, database2: 12, mail: 13, siteA: 14, siteB: 15}
	return fmt.Sprintf("10.0.0.%d", numbers[name]), fmt.Sprintf("2001:db8::%d", numbers[name])
}

// bin is the directory of the binaries.
var bin string

// TestMain builds the binaries and runs the tests.
func TestMain(m *testing.M) {
	var err error
	if bin, err = process.Build("nametap", "nametap-discovery"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(bin)
	os.Exit(code)
}

// A world is the host and its network.
type world struct {
	tb            testing.TB
	dir           string // which every user may read
	host, network *netns.NS
}

// newWorld makes a world whose agent is ready. flags are those of the agent besides --capture and
// --egress, commands those that the test needs.
func newWorld(tb testing.TB, flags []string, commands ...string) *world {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Fatal("this test makes network namespaces: run it as root")
	}
	for _, command := range append(commands, "ip", "iptables-nft", "ip6tables-nft", "unshare") {
		if _, err := exec.LookPath(command); err != nil {
			tb.Fatalf("a command is missing, `make egress` installs its package on Debian: %v", err)
		}
	}
	w := &world{tb: tb, dir: tb.TempDir(), host: netns.New(tb), network: netns.New(tb)}
	for dir := w.dir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil { // servers and the agent are other users
			tb.Fatal(err)
		}
	}
	w.connect()
	w.startControlPlane()
	w.startAgent(flags)
	return w
}

// connect connects host and network, gives the servers their addresses, and starts the nameserver.
func (w *world) connect() {
	w.tb.Helper()
	inner := netns.End{NS: w.host, Name: "eth0", Addrs: []string{"10.0.0.1/24", "2001:db8::1/64"}}
	outer := netns.End{NS: w.network, Name: "eth0", Addrs: []string{gateway + "/24", gateway6 + "/64"}}
	var records []string
	for _, name := range []string{database1, database2, mail, siteA, siteB} {
		v4, v6 := addresses(name)
		records = append(records, name+". 60 IN A "+v4, name+". 60 IN AAAA "+v6)
		outer.Addrs = append(outer.Addrs, v4+"/24", v6+"/64")
	}
	netns.Connect(inner, outer)
	w.host.Exec("ip", "route", "add", "default", "via", gateway)
	w.host.Exec("ip", "-6", "route", "add", "default", "via", gateway6)
	w.network.Run(func() {
		fakedns.Start(w.tb, fakedns.Answer(records...), fakedns.On(netip.MustParseAddrPort(gateway+":53")))
	})
}

// startControlPlane starts nametap-discovery.
func (w *world) startControlPlane() {
	w.tb.Helper()
	objects := w.mkdir("objects", 0)
	w.write("objects/hosts.yaml", serviceEntries)
	w.startProcess(w.network, exec.Command(filepath.Join(bin, "nametap-discovery"), "--config-dir", objects,
		"--grpc-addr", gateway+":15010", "--state-dir", ""))
}

// startAgent starts the agent, and returns when it has the table and captures.
func (w *world) startAgent(flags []string) {
	w.tb.Helper()
	args := append([]string{"agent", "--capture", "--egress", "--xds-addr", gateway + ":15010", "--xds-plaintext", "--state-dir", "",
		"--status-addr", statusAddr, "--resolv-conf", w.write("resolv.conf", "nameserver "+gateway+"\n")}, flags...)
	cmd := exec.Command(filepath.Join(bin, "nametap"), args...)
	cmd.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+w.mkdir("runtime", agentID), "POD_NAME=client", "POD_NAMESPACE=shop", "INSTANCE_IP=10.0.0.1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: agentID, Gid: agentID}, AmbientCaps: []uintptr{capNetAdmin},
		Pdeathsig: syscall.SIGKILL, Setsid: true,
	}
	log := testlog.New(w.tb)
	cmd.Stdout, cmd.Stderr = log, log
	if err := w.host.Start(cmd); err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() }) // the namespace ends with its rules
	wait.Until(w.tb, "the agent has the table, and captures both families", func() bool {
		s := w.status()
		return s.Ready && s.XDS.Loaded && len(s.Capture.Rules.Families) == 2 &&
			!slices.ContainsFunc(s.Capture.Rules.Families, func(f familyStatus) bool { return f.State != "in place" })
	})
}

// A status is a part of what `nametap status` prints.
type status struct {
	Ready   bool
	XDS     struct{ Loaded bool }
	Capture struct {
		Rules struct{ Families []familyStatus }
	}
	Egress struct {
		Hosts   []hostStatus
		Refused []struct{ Reason, Error string }
	}
}

type familyStatus struct{ State string }

type hostStatus struct {
	Host, Name   string
	VIP, Address netip.AddrPort
	PortsUnknown bool
	Total        int
	Sent         int
	Received     int
}

// status returns the status of the agent, the zero value if it does not listen yet.
func (w *world) status() (s status) {
	w.tb.Helper()
	cmd := exec.Command(filepath.Join(bin, "nametap"), "status", "--status-addr", statusAddr, "--output", "json")
	cmd.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+filepath.Join(w.dir, "runtime"))
	var output bytes.Buffer
	cmd.Stdout = &output
	if err := w.host.Start(cmd); err != nil {
		w.tb.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		return status{}
	}
	if err := json.Unmarshal(output.Bytes(), &s); err != nil {
		w.tb.Fatalf("nametap status: %v\n%s", err, &output)
	}
	return s
}

// hostStatus returns what the agent knows of connections to a name.
func (w *world) hostStatus(name string) hostStatus {
	w.tb.Helper()
	hosts := w.status().Egress.Hosts
	at := slices.IndexFunc(hosts, func(h hostStatus) bool { return h.Name == name })
	if at < 0 {
		w.tb.Fatalf("the agent carried no connection to %s: %+v", name, hosts)
	}
	return hosts[at]
}

// client runs a program on the host and returns its standard output. The nameserver of its
// /etc/resolv.conf is in the network. options are those of resolv.conf, such as no-aaaa.
func (w *world) client(options string, args ...string) string {
	w.tb.Helper()
	command := w.withResolvConf(options, args...)
	return w.host.Exec(command.Args[0], command.Args[1:]...)
}

// withResolvConf returns a command with a resolv.conf whose nameserver is in the network.
func (w *world) withResolvConf(options string, args ...string) *exec.Cmd {
	w.tb.Helper()
	path := w.write("client"+options+".conf", "nameserver "+gateway+"\noptions attempts:1 "+options+"\n")
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	return exec.Command("unshare", append([]string{"--mount", "sh", "-c", script, path}, args...)...)
}

// write writes a file and returns its path.
func (w *world) write(name, text string) string {
	w.tb.Helper()
	path := filepath.Join(w.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		w.tb.Fatal(err)
	}
	return path
}

// mkdir makes a directory of a user and returns its path.
func (w *world) mkdir(name string, uid int) string {
	w.tb.Helper()
	path := filepath.Join(w.dir, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		w.tb.Fatal(err)
	}
	if err := os.Chown(path, uid, uid); err != nil {
		w.tb.Fatal(err)
	}
	return path
}
