// Command egress measures connections to automatic VIPs that the agent carries, beside HAProxy in TCP
// mode and nginx with its stream module, which proxy the same connections to the same server.
//
// It needs root, ip, iptables, haproxy, nginx and nginx's stream module, and works in network namespaces of its own: one with
// the clients and the proxies, one with the server. A relay of some lines of Go shows which part of the cost is Go's.
// It prints medians of rounds in which the proxies take turns, and their ratios.
package main

import (
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
	nginxPort   = 9101
	prereadPort = 9201
	relayPort   = 9301
)

// options are the options of the command.
type options struct {
	rounds, connects, idle int
	bytes                  int64
	binary                 string
	hold                   bool
}

func main() {
	var o options
	role := flag.String("role", "", "used by the command itself")
	flag.IntVar(&o.rounds, "rounds", 7, "rounds of each measurement")
	flag.IntVar(&o.connects, "connects", 1000, "connections in a round")
	flag.IntVar(&o.idle, "idle", 4200, "idle connections, for which each proxy needs two descriptors; 0 leaves this out")
	flag.Int64Var(&o.bytes, "bytes", 4<<30, "bytes of a stream; 0 leaves streams out")
	flag.StringVar(&o.binary, "nametap", "", "path of the agent (default: it is built)")
	flag.BoolVar(&o.hold, "hold", false, "only start everything, and print processes and addresses, for profilers and strace")
	flag.Parse()
	var err error
	switch *role {
	case "":
		err = enter()
	case "server":
		err = serve()
	case "relay":
		err = relay(flag.Args())
	case "asker":
		err = ask()
	default:
		err = measure(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "egress:", err)
		os.Exit(1)
	}
}

// enter runs this command again in network and mount namespaces of its own.
func enter() error {
	for _, tool := range []string{"ip", "iptables", "haproxy", "nginx"} {
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

// run runs a command of the system.
func run(name string, args ...string) error {
	output, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %v: %w\n%s", name, args, err, output)
	}
	return nil
}
