package guard

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/test/machines/lab"
)

const (
	gateway  = "10.0.0.2" // of the network, with the nameserver
	neighbor = "neighbor.example.com"
	shared   = "203.0.113.20" // the address of several names, as of a CDN
	sshHost  = "git.example.com"
	sshIP    = "203.0.113.22"
)

// hosts are the names of the servers, and the directory of each below the directory of the network. All but one have the
// same address.
var hosts = []string{
	"deb.example.org", "pypi.example.org", "files.pypi-cdn.example", "registry.npm.example", "proxy.golang.example", "index.crates.example",
	"static.crates.example", "web.example.com", sshHost, neighbor,
}

func TestMain(m *testing.M) {
	os.Exit(lab.Main(m, "ip", "iptables", "unshare", "apt-get", "dpkg-deb", "dpkg-scanpackages", "python3", "npm", "node", "go", "cargo", "git", "ssh", "ssh-keygen", "sshd", "curl", "chromium", "java", "keytool"))
}

// A world is a host with an agent, and the network around it.
type world struct {
	*lab.Place // the host
	network    *lab.Place
	ca         string // the file of the authority
	key        string // the hash of the servers' key
	agent      *lab.Process

	mu       sync.Mutex
	queries  map[string]int // that reached the nameserver, by name
	requests map[string]int // that reached the servers, by host
}

// newWorld makes a world without an agent.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Place: lab.NewPlace(t), queries: map[string]int{}, requests: map[string]int{}}
	w.network = w.Beside("network")
	outer := netns.End{NS: w.network.NS, Name: "eth0", Addrs: []string{gateway + "/24", shared + "/32", sshIP + "/32"}}
	netns.Connect(netns.End{NS: w.NS, Name: "eth0", Addrs: []string{"10.0.0.1/24"}}, outer)
	w.Exec("ip", "route", "add", "default", "via", gateway)
	var records []string
	for _, name := range hosts {
		address := shared
		if name == sshHost {
			address = sshIP
		}
		records = append(records, name+". 60 IN A "+address)
	}
	for name := range many {
		_, address := server(name)
		records = append(records, fmt.Sprintf("n%d.many.example.com. 60 IN A %s", name, address))
	}
	answer := fakedns.Answer(records...)
	w.network.Run(func() {
		fakedns.Start(t, func(query *dns.Msg, network string) *dns.Msg {
			w.mu.Lock()
			w.queries[query.Question[0].Name]++
			w.mu.Unlock()
			return answer(query, network)
		}, fakedns.On(netip.MustParseAddrPort(gateway+":53")))
	})
	w.serve()
	w.startSSH()
	return w
}

// serve starts the web servers, on ports 80 and 443.
func (w *world) serve() {
	w.TB.Helper()
	certificate := w.authority()
	handler := http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		host, _, _ := strings.Cut(r.Host, ":")
		w.mu.Lock()
		w.requests[host]++
		w.mu.Unlock()
		to.Header().Set("Alt-Svc", `h3=":443"; ma=86400`) // nobody listens there: clients have to fall back
		if r.URL.RawQuery != "" {
			to.Header().Set("Connection", "close") // the next request needs another connection
		}
		path := filepath.Join(w.network.Path(host), filepath.Clean("/"+r.URL.Path))
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			path = filepath.Join(path, "index.html")
		}
		http.ServeFile(to, r, path)
	})
	for _, address := range []string{shared, sshIP} {
		for _, port := range []string{"80", "443"} {
			var ln net.Listener
			var err error
			w.network.Run(func() { ln, err = net.Listen("tcp", net.JoinHostPort(address, port)) })
			if err != nil {
				w.TB.Fatal(err)
			}
			if port == "443" {
				ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"h2", "http/1.1"}, MinVersion: tls.VersionTLS12})
			}
			server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
			go func() { _ = server.Serve(ln) }()
			w.TB.Cleanup(func() { server.Close() })
		}
	}
}

// authority makes an authority, which it writes to the file w.ca, and returns a certificate for all hosts.
func (w *world) authority() tls.Certificate {
	w.TB.Helper()
	fail := func(err error) {
		if err != nil {
			w.TB.Fatal(err)
		}
	}
	template := func(name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, BasicConstraintsValid: true,
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour * 24),
		}
	}
	root, leaf := template("authority"), template("servers")
	root.IsCA, root.KeyUsage = true, x509.KeyUsageCertSign
	leaf.DNSNames, leaf.KeyUsage, leaf.ExtKeyUsage = hosts, x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	rootKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	fail(err)
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	fail(err)
	rootText, err := x509.CreateCertificate(rand.Reader, root, root, &rootKey.PublicKey, rootKey)
	fail(err)
	leafText, err := x509.CreateCertificate(rand.Reader, leaf, root, &leafKey.PublicKey, rootKey)
	fail(err)
	public, err := x509.MarshalPKIXPublicKey(&leafKey.PublicKey)
	fail(err)
	sum := sha256.Sum256(public)
	w.key = base64.StdEncoding.EncodeToString(sum[:])
	w.ca = w.Write("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: rootText})))
	return tls.Certificate{Certificate: [][]byte{leafText, rootText}, PrivateKey: leafKey}
}

// startSSH starts an SSH server in the network, for root with the key of the host's file "key".
func (w *world) startSSH() {
	w.TB.Helper()
	dir := w.network.Mkdir("ssh", 0)
	for _, key := range []string{w.Path("key"), filepath.Join(dir, "host")} {
		w.Exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
	}
	conf := w.network.Write("ssh/sshd_config", fmt.Sprintf(`ListenAddress %s
HostKey %s/host
AuthorizedKeysFile %s.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
`, sshIP, dir, w.Path("key")))
	// The first process of a namespace: the kernel kills the others when it has ended.
	server := exec.Command("sh", "-c", `mkdir -p /run/sshd; /usr/sbin/sshd -D -e -f "$0" & wait`, conf)
	server.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Setsid: true}
	w.network.Spawn("sshd", server).Await("sshd listens", func() bool {
		conn, err := w.network.Dial(w.TB.Context(), "tcp", sshIP+":22")
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// guard starts an agent with a policy, or replaces the agent that runs.
func (w *world) guard(policy string) {
	w.TB.Helper()
	if w.agent != nil {
		w.agent.End(syscall.SIGTERM)
	}
	w.Runtime = w.Mkdir("runtime", lab.AgentID)
	agent := w.AgentCommand("client", "shop", "--capture", "--guard", w.Write("policy.yaml", policy), "--instance-ip", "10.0.0.1", "--xds-addr", "127.0.0.1:1", "--xds-plaintext",
		"--drain", "0s", "--state-dir", w.Mkdir("state", lab.AgentID), "--resolv-conf", w.Write("resolv.conf", "nameserver "+gateway+"\n"))
	w.agent = w.Spawn("agent", lab.Unprivileged(agent))
	// In mode audit, DNS fails open until then.
	w.agent.Await("the host is guarded", func() bool { return w.agent.Logged("queries of clients to a nameserver reach the agent") > 0 })
}

// client runs a program on the host, and returns what it prints. The program has the nameserver of the network, the
// authority, and no other environment.
func (w *world) client(args ...string) (string, error) {
	w.TB.Helper()
	home := w.Mkdir("home", 0)
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	env := []string{
		"env", "-i", "PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home, "RUSTUP_HOME=/root/.rustup", "SSL_CERT_FILE=" + w.ca, "CURL_CA_BUNDLE=" + w.ca,
		"GIT_SSL_CAINFO=" + w.ca, "NODE_EXTRA_CA_CERTS=" + w.ca, "npm_config_cafile=" + w.ca, "PIP_CERT=" + w.ca, "CARGO_HTTP_CAINFO=" + w.ca,
		"GIT_TERMINAL_PROMPT=0", "GIT_SSH_COMMAND=ssh -i " + w.Path("key") + " -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
		"GOPROXY=https://proxy.golang.example", "GONOSUMDB=*", "GONOSUMCHECK=1", "GOFLAGS=-mod=mod", "GOTOOLCHAIN=local", "GOPATH=" + home + "/go", "GOCACHE=" + home + "/gocache",
	}
	return w.Try("", nil, append(append([]string{"unshare", "--mount", "sh", "-c", script, w.Write("client.conf", "nameserver "+gateway+"\n")}, env...), args...)...)
}

// sh runs a script of the host, which must succeed.
func (w *world) sh(script string, args ...string) string {
	w.TB.Helper()
	return w.Exec("sh", append([]string{"-euc", script, "sh"}, args...)...)
}

// tarball returns an archive with files, by their names.
func tarball(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	archive := tar.NewWriter(zipped)
	for name, text := range files {
		err := archive.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = archive.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zipped.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
