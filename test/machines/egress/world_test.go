package egress

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// Names and addresses.
const (
	gateway, gateway6 = "10.0.0.2", "2001:db8::2" // of the network, with the nameserver and the control plane

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

func TestMain(m *testing.M) {
	os.Exit(lab.Main(m, "ip", "iptables-nft", "ip6tables-nft", "unshare", "mariadbd", "mariadb", "mariadb-install-db", "exim4", "nginx", "tinyproxy", "curl"))
}

// A world is the host and its network. Servers and clients have their files in the directory of the host, which every user
// may read.
type world struct {
	*lab.Place // the host
	network    *lab.Place
}

// newWorld makes a world whose agent is ready. flags are those of the agent besides --capture and --egress.
func newWorld(t *testing.T, flags ...string) *world {
	t.Helper()
	w := &world{Place: lab.NewPlace(t)}
	w.network = w.Beside("network")
	w.connect()
	w.Write("network/objects/hosts.yaml", serviceEntries)
	w.network.Discovery("control", "127.0.0.1:15014", nil, "--config-dir", w.network.Path("objects"), "--grpc-addr", gateway+":15010")
	w.Runtime = w.Mkdir("runtime", lab.AgentID)
	agent := w.AgentCommand("client", "shop", append([]string{"--capture", "--egress", "--instance-ip", "10.0.0.1", "--xds-addr", gateway + ":15010", "--xds-plaintext",
		"--state-dir", "", "--resolv-conf", w.Write("resolv.conf", "nameserver "+gateway+"\n")}, flags...)...)
	w.Spawn("agent", lab.Unprivileged(agent)).Await("the agent has the table, and captures both families", func() bool {
		s := w.status()
		return s.Ready && s.XDS.Loaded && len(s.Capture.Rules.Families) == 2 &&
			!slices.ContainsFunc(s.Capture.Rules.Families, func(f familyStatus) bool { return f.State != "in place" })
	})
	return w
}

// serve starts a server in the network, in a process namespace of its own, whose processes all end with the test.
func (w *world) serve(name string, args ...string) *lab.Process {
	w.TB.Helper()
	// The shell is the first process of its namespace: the kernel kills the others when it has ended.
	shell := exec.Command("sh", append([]string{"-c", `"$@" & wait`, "sh"}, args...)...)
	shell.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Setsid: true}
	return w.network.Spawn(name, shell)
}

// await waits until a server of the network accepts connections.
func (w *world) await(port string, addrs ...string) {
	w.TB.Helper()
	for _, addr := range addrs {
		wait.Until(w.TB, addr+" listens on port "+port, func() bool {
			conn, err := w.network.Dial(w.TB.Context(), "tcp", net.JoinHostPort(addr, port))
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
	}
}

// certificate writes a certificate for names, signed by itself, and returns the paths of it and its
// key, which every user may read.
func (w *world) certificate(names ...string) (cert, key string) {
	w.TB.Helper()
	cert, key = w.Path("cert.pem"), w.Path("key.pem")
	w.Exec("sh", "-euc", `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=servers -addext "subjectAltName=$3" -out "$1" -keyout "$2" 2>/dev/null
chmod 644 "$2"`, "sh", cert, key, "DNS:"+strings.Join(names, ",DNS:"))
	return cert, key
}

// connect connects host and network, gives the servers their addresses, and starts the nameserver.
func (w *world) connect() {
	w.TB.Helper()
	inner := netns.End{NS: w.NS, Name: "eth0", Addrs: []string{"10.0.0.1/24", "2001:db8::1/64"}}
	outer := netns.End{NS: w.network.NS, Name: "eth0", Addrs: []string{gateway + "/24", gateway6 + "/64"}}
	var records []string
	for _, name := range []string{database1, database2, mail, siteA, siteB} {
		v4, v6 := addresses(name)
		records = append(records, name+". 60 IN A "+v4, name+". 60 IN AAAA "+v6)
		outer.Addrs = append(outer.Addrs, v4+"/24", v6+"/64")
	}
	netns.Connect(inner, outer)
	w.Exec("ip", "route", "add", "default", "via", gateway)
	w.Exec("ip", "-6", "route", "add", "default", "via", gateway6)
	w.network.Run(func() {
		fakedns.Start(w.TB, fakedns.Answer(records...), fakedns.On(netip.MustParseAddrPort(gateway+":53")))
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
	text, err := w.Try("", []string{"RUNTIME_DIRECTORY=" + w.Runtime}, lab.Program(w.TB, "nametap"), "status", "--status-addr", lab.AgentStatus, "--output", "json")
	if err == nil {
		err = json.Unmarshal([]byte(text), &s)
	}
	if err != nil {
		return status{}
	}
	return s
}

// hostStatus returns what the agent knows of connections to a name.
func (w *world) hostStatus(name string) hostStatus {
	w.TB.Helper()
	hosts := w.status().Egress.Hosts
	at := slices.IndexFunc(hosts, func(h hostStatus) bool { return h.Name == name })
	if at < 0 {
		w.TB.Fatalf("the agent carried no connection to %s: %+v", name, hosts)
	}
	return hosts[at]
}

// client runs a program on the host and returns its standard output. The nameserver of its
// /etc/resolv.conf is in the network. options are those of resolv.conf, such as no-aaaa.
func (w *world) client(options string, args ...string) string {
	w.TB.Helper()
	command := w.withResolvConf(options, args...)
	return w.Exec(command[0], command[1:]...)
}

// withResolvConf returns a command with a resolv.conf whose nameserver is in the network.
func (w *world) withResolvConf(options string, args ...string) []string {
	w.TB.Helper()
	path := w.Write("client"+options+".conf", "nameserver "+gateway+"\noptions attempts:1 "+options+"\n")
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	return append([]string{"unshare", "--mount", "sh", "-c", script, path}, args...)
}
