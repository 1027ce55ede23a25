// Command egress measures connections to automatic VIPs that the agent carries, beside HAProxy in TCP
// mode, which proxies the same connections to the same server.
//
// It needs root, ip, iptables and haproxy, and works in network namespaces of its own: one with
// the clients and the proxies, one with the server. A relay of some lines of Go shows which part of the cost is Go's.
// It prints medians of rounds in which the proxies take turns.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// Addresses in the namespaces.
const (
	clientIP = "10.99.0.1"
	serverIP = "10.99.0.2"
)

// Ports of the server.
const (
	echoPort   = 7001 // greets, then echoes
	sourcePort = 7002 // sends as many bytes as it is asked for
	helloPort  = 7443 // answers a ClientHello with a byte
)

// Names of hosts, which the server's nameserver resolves to the address of the server, and ports of the proxies.
const (
	exactHost   = "db.example.com"
	wildcard    = "*.apps.example.com"
	belowHost   = "a.apps.example.com"
	egressPort  = "15054"
	haproxyPort = 9001 // and the next ones, for the ports of the server
	relayPort   = 9301
)

// options are the options of the command.
type options struct {
	rounds, connects, idle int
	bytes                  int64
	binary                 string
}

func main() {
	var o options
	role := flag.String("role", "", "used by the command itself")
	flag.IntVar(&o.rounds, "rounds", 7, "rounds of each measurement")
	flag.IntVar(&o.connects, "connects", 1000, "connections in a round")
	flag.IntVar(&o.idle, "idle", 4200, "idle connections, for which each proxy needs two descriptors")
	flag.Int64Var(&o.bytes, "bytes", 4<<30, "bytes of a stream")
	flag.StringVar(&o.binary, "nametap", "", "path of the agent (default: it is built)")
	flag.Parse()
	var err error
	switch *role {
	case "":
		err = enter()
	case "server":
		err = serve()
	case "relay":
		err = relay(flag.Args())
	default:
		err = measure(context.Background(), o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "egress:", err)
		os.Exit(1)
	}
}

// enter runs this command again in network and mount namespaces of its own.
func enter() error {
	for _, tool := range []string{"ip", "iptables", "haproxy"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%s is missing: %w", tool, err)
		}
	}
	if os.Getuid() != 0 || runtime.NumCPU() < 2 {
		return errors.New("want root and two processors")
	}
	cmd := exec.Command("/proc/self/exe", append([]string{"-role", "clients"}, os.Args[1:]...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}
