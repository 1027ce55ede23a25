package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// A proxy is a compared way from the clients to the server. pid is 0 without a proxy.
type proxy struct {
	name string
	pid  int
	// addrs are the addresses to which clients connect, by the port of the server.
	addrs map[int]string
}

// A stage has the namespaces and the processes.
type stage struct {
	dir     string
	started []*exec.Cmd
}

// newStage makes the namespaces, and starts the server.
func newStage() (*stage, error) {
	dir, err := os.MkdirTemp("", "egress")
	if err != nil {
		return nil, err
	}
	s := &stage{dir: dir}
	if err := os.Chmod(dir, 0o755); err != nil { // the agent has another user
		return s, err
	}
	cmd := exec.Command("/proc/self/exe", "-role", "server")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return s, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return s, err
	}
	if err := cmd.Start(); err != nil {
		return s, err
	}
	s.started = append(s.started, cmd)
	pid := fmt.Sprint(cmd.Process.Pid)
	for _, line := range []string{
		"ip link set lo up",
		"ip link add eth0 type veth peer name eth0 netns " + pid,
		"ip address add " + clientIP + "/24 dev eth0", "ip link set eth0 up", "ip route add default via " + serverIP,
		"nsenter --net --target " + pid + " ip link set lo up",
		"nsenter --net --target " + pid + " ip address add " + serverIP + "/24 dev eth0",
		"nsenter --net --target " + pid + " ip link set eth0 up",
		"sysctl -qw net.ipv4.ip_local_port_range=1024\t65000",
		// Ended connections keep no port. Otherwise the search for a free one would be most of what is measured.
		"sysctl -qw net.ipv4.tcp_max_tw_buckets=0",
		"nsenter --net --target " + pid + " sysctl -qw net.ipv4.tcp_max_tw_buckets=0",
	} {
		fields := strings.Split(line, " ")
		if err := run(fields[0], fields[1:]...); err != nil {
			return s, err
		}
	}
	if _, err := in.Write([]byte("\n")); err != nil {
		return s, err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return s, fmt.Errorf("the server does not listen: %w", err)
	}
	return s, nil
}

// end ends the processes. nginx ends its workers only if it is not killed.
func (s *stage) end() {
	for _, cmd := range s.started {
		kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		kill.Stop()
	}
	_ = os.RemoveAll(s.dir)
}

// start starts a process, with its output in a file.
func (s *stage) start(name string, cmd *exec.Cmd) error {
	output, err := os.Create(filepath.Join(s.dir, name+".log"))
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = output, output
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGTERM
	if err := cmd.Start(); err != nil {
		return err
	}
	s.started = append(s.started, cmd)
	return nil
}

// write writes a file.
func (s *stage) write(name, text string) (string, error) {
	path := filepath.Join(s.dir, name)
	return path, os.WriteFile(path, []byte(text), 0o644)
}

// redirected adds rules that redirect the address ip to a proxy, as nametap's rules do for VIPs. It returns the proxy
// as clients reach it at that address.
func redirected(p *proxy, ip string) (*proxy, error) {
	r := &proxy{name: p.name + ", redirected", pid: p.pid, addrs: map[int]string{}}
	for port, addr := range p.addrs {
		_, to, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		if err := run("iptables", "-t", "nat", "-A", "OUTPUT", "-d", ip, "-p", "tcp", "--dport", strconv.Itoa(port), "-j", "REDIRECT", "--to-ports", to); err != nil {
			return nil, err
		}
		r.addrs[port] = fmt.Sprintf("%s:%d", ip, port)
	}
	return r, nil
}

// haproxy starts HAProxy in TCP mode, with splice.
func (s *stage) haproxy() (*proxy, error) {
	text := "global\n maxconn 6000\n log stderr local0\ndefaults\n mode tcp\n option splice-auto\n timeout connect 5s\n timeout client 1h\n timeout server 1h\n"
	p := &proxy{name: "haproxy", addrs: map[int]string{}}
	for i, port := range []int{echoPort, sourcePort} {
		addr := fmt.Sprintf("127.0.0.1:%d", haproxyPort+i)
		text += fmt.Sprintf("listen l%d\n bind %s\n server s %s:%d\n", port, addr, serverIP, port)
		p.addrs[port] = addr
	}
	path, err := s.write("haproxy.cfg", text)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("haproxy", "-db", "-f", path)
	if err := s.start(p.name, cmd); err != nil {
		return nil, err
	}
	p.pid = cmd.Process.Pid
	return p, s.awaitProxy(p)
}

// nginx starts nginx with its stream module, and one server that reads the SNI.
func (s *stage) nginx() (*proxy, error) {
	p := &proxy{name: "nginx", addrs: map[int]string{}}
	text := "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\nworker_processes 2;\ndaemon off;\npid " + s.dir + "/nginx.pid;\nerror_log stderr;\nevents { worker_connections 19000; }\nstream {\n resolver " + serverIP + " ipv6=off;\n"
	for i, port := range []int{echoPort, sourcePort} {
		addr := fmt.Sprintf("127.0.0.1:%d", nginxPort+i)
		text += fmt.Sprintf(" server { listen %s; proxy_pass %s:%d; proxy_timeout 1h; }\n", addr, serverIP, port)
		p.addrs[port] = addr
	}
	p.addrs[helloPort] = fmt.Sprintf("127.0.0.1:%d", prereadPort)
	text += fmt.Sprintf(" server { listen %s; ssl_preread on; proxy_pass $ssl_preread_server_name:%d; }\n}\n", p.addrs[helloPort], helloPort)
	path, err := s.write("nginx.conf", text)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("nginx", "-c", path, "-p", s.dir)
	if err := s.start(p.name, cmd); err != nil {
		return nil, err
	}
	p.pid = cmd.Process.Pid
	return p, s.awaitProxy(p)
}

// await returns when a process accepts connections at an address.
func await(addr string) error {
	var err error
	for range 500 {
		var conn net.Conn
		if conn, err = net.DialTimeout("tcp", addr, time.Second); err == nil {
			return conn.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("no process accepts connections at %s: %w", addr, err)
}

// awaitProxy calls await. If that fails, its error has the output of the process.
func (s *stage) awaitProxy(p *proxy) error {
	err := await(p.addrs[echoPort])
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(s.dir, p.name+".log"))
		err = fmt.Errorf("%s: %w\n%s", p.name, err, log)
	}
	return err
}

// entries are the hosts, as nametap-discovery reads them.
const entries = `apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: db, namespace: shop}
spec: {hosts: [` + exactHost + `], resolution: DNS}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: apps, namespace: shop}
spec: {hosts: ["` + wildcard + `"], resolution: DYNAMIC_DNS}
`

// agentUser is the user and group of the agent, whose packets the agent's rules do not redirect.
const agentUser = 1337

// nametap starts a control plane and the agent, and asks the agent for the VIPs.
func (s *stage) nametap(binary string) (*proxy, error) {
	config := filepath.Join(s.dir, "config")
	if err := os.Mkdir(config, 0o755); err != nil {
		return nil, err
	}
	if _, err := s.write("config/hosts.yaml", entries); err != nil {
		return nil, err
	}
	resolvConf, err := s.write("resolv.conf", "nameserver "+serverIP+"\n")
	if err != nil {
		return nil, err
	}
	if err := s.build(&binary); err != nil {
		return nil, err
	}
	if err := s.start("discovery", exec.Command(filepath.Join(s.dir, "nametap-discovery"), "--config-dir", config, "--http-addr", "127.0.0.1:18080", "--grpc-addr", "127.0.0.1:18010")); err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, "agent", "--capture", "--egress", "--egress-addr", "localhost:"+egressPort, "--xds-addr", "127.0.0.1:18010", "--xds-plaintext",
		"--resolv-conf", resolvConf, "--state-dir", "", "--namespace", "shop", "--capture-resolved=false")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: agentUser, Gid: agentUser}, AmbientCaps: []uintptr{12}}
	if err := s.start("nametap", cmd); err != nil {
		return nil, err
	}
	p := &proxy{name: "nametap", pid: cmd.Process.Pid, addrs: map[int]string{}}
	for host, ports := range map[string][]int{exactHost: {echoPort, sourcePort}, belowHost: {helloPort}} {
		vip, err := vipOf(host)
		if err != nil {
			log, _ := os.ReadFile(filepath.Join(s.dir, "nametap.log"))
			return nil, fmt.Errorf("%w\n%s", err, log)
		}
		for _, port := range ports {
			p.addrs[port] = fmt.Sprintf("%s:%d", vip, port)
		}
	}
	return p, s.awaitProxy(p)
}

// build builds the agent, unless binary names one, and the control plane.
func (s *stage) build(binary *string) error {
	args := []string{"build", "-C", "..", "-tags", "grpcnotrace,nethttpomithttp2", "-o", s.dir, "./cmd/nametap", "./cmd/nametap-discovery"}
	build := exec.Command("go", args...)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("building: %w\n%s", err, output)
	}
	if *binary == "" {
		*binary = filepath.Join(s.dir, "nametap")
	}
	return nil
}

// vipOf returns the VIP that the agent answers for a host. The capture rules redirect its query to the agent.
func vipOf(host string) (string, error) {
	var err error
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		var reply *dns.Msg
		client := dns.Client{Timeout: time.Second}
		reply, _, err = client.Exchange(new(dns.Msg).SetQuestion(host+".", dns.TypeA), serverIP+":53")
		if err == nil && len(reply.Answer) == 1 {
			if a, ok := reply.Answer[0].(*dns.A); ok && strings.HasPrefix(a.A.String(), "240.") {
				return a.A.String(), nil
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	return "", fmt.Errorf("%s has no VIP: %w", host, err)
}
