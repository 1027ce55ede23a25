package egress

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// startProcess starts a command in a network namespace and in a process namespace of its own, whose
// processes all end with the test, also if it is interrupted.
func (w *world) startProcess(ns *netns.NS, cmd *exec.Cmd) *testlog.Buffer {
	w.tb.Helper()
	// The shell is the first process of its namespace: the kernel kills the others when it has ended.
	shell := exec.Command("sh", append([]string{"-c", `"$@" & wait`, "sh"}, cmd.Args...)...)
	shell.Env = cmd.Env
	shell.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL, Setsid: true}
	log := testlog.New(w.tb)
	shell.Stdout, shell.Stderr = log, log
	if err := ns.Start(shell); err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { _, _ = shell.Process.Kill(), shell.Wait() }) // nothing of a server is kept
	return log
}

// await waits until a server of the network accepts connections.
func (w *world) await(addr, port string) {
	w.tb.Helper()
	wait.Until(w.tb, addr+" listens on port "+port, func() bool {
		conn, err := w.dial(w.network, net.JoinHostPort(addr, port))
		if err != nil {
			return false
		}
		conn.Close()
		return true
	})
}

// dial connects to an address from a namespace.
func (w *world) dial(ns *netns.NS, addr string) (conn net.Conn, err error) {
	ns.Run(func() { conn, err = net.DialTimeout("tcp", addr, wait.Limit) })
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(wait.Limit))
	}
	return conn, err
}

// readLine reads one line.
func readLine(tb testing.TB, from net.Conn) string {
	tb.Helper()
	line, err := bufio.NewReader(from).ReadString('\n')
	if err != nil {
		tb.Fatalf("reading a line: %q, %v", line, err)
	}
	return strings.TrimSpace(line)
}

// certificate writes a certificate for names, signed by itself, and returns the paths of it and its
// key, which every user may read.
func (w *world) certificate(names ...string) (cert, key string) {
	w.tb.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "servers of the test"}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		w.tb.Fatal(err)
	}
	privateDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		w.tb.Fatal(err)
	}
	encode := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	return w.write("cert.pem", encode("CERTIFICATE", der)), w.write("key.pem", encode("PRIVATE KEY", privateDER))
}
