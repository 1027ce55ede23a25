package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
)

// relay is a proxy as short as Go allows: it accepts, dials, and copies by io.Copy in both directions. It shows what a
// proxy in Go costs that does nothing else. Each argument is where to listen, "=", and the address to dial.
func relay(pairs []string) error {
	failed := make(chan error)
	for _, pair := range pairs {
		from, to, _ := strings.Cut(pair, "=")
		var config net.ListenConfig
		config.SetMultipathTCP(false) // like the agent
		listener, err := config.Listen(context.Background(), "tcp", from)
		if err != nil {
			return err
		}
		go func() { failed <- relayTo(listener, to) }()
	}
	return <-failed
}

// relayTo relays the connections of a listener.
func relayTo(listener net.Listener, to string) error {
	for {
		client, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer client.Close()
			host, err := net.Dial("tcp", to)
			if err != nil {
				return
			}
			defer host.Close()
			up := make(chan struct{})
			go func() {
				defer close(up)
				pass(host, client)
			}()
			pass(client, host)
			<-up
		}()
	}
}

// pass copies until the end of the data, and then ends the data to the other peer.
func pass(to, from net.Conn) {
	_, _ = io.Copy(to, from) // after an error, the other direction has one, too
	_ = to.(*net.TCPConn).CloseWrite()
}

// relay starts a process with [relay].
func (s *stage) relay(ctx context.Context) (*proxy, error) {
	own, err := os.Executable()
	if err != nil {
		return nil, err
	}
	addrs, argv := map[int]string{}, []string{own, "-role", "relay"}
	for i, port := range []int{echoPort, sourcePort} {
		addrs[port] = fmt.Sprintf("127.0.0.1:%d", relayPort+i)
		argv = append(argv, fmt.Sprintf("%s=%s:%d", addrs[port], serverIP, port))
	}
	return s.start(ctx, "relay", addrs, argv...)
}
