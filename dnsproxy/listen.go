package dnsproxy

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/listen"
)

// addrSetting names [Config.Addr] in errors.
const addrSetting = "dns-addr"

// An Addr is the address of a listener.
type Addr = listen.Addr

// listeners are the sockets of a Server.
type listeners struct {
	*listen.Set

	config  *Config
	handler *front
	limit   *connlimit.Limit // of all TCP listeners; nil before open is called
}

// newListeners returns the listeners of a Config. It opens none.
func newListeners(config *Config, handler *front) (*listeners, error) {
	ls := &listeners{config: config, handler: handler}
	var err error
	ls.Set, err = listen.New(listen.Spec{
		Name: "DNS", Setting: addrSetting, Addr: config.Addr, Networks: []string{"udp", "tcp"}, Required: true,
		Control: configureSocket, Opened: ls.changed, Log: config.Logger,
	}, config.Inherited)
	return ls, err
}

// configureSocket sets the options of a socket.
func configureSocket(network, address string, conn syscall.RawConn) error {
	if strings.HasPrefix(network, "tcp") {
		return nil // newTCPListener sets them
	}
	bound, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	return configureUDP(conn, bound.Addr())
}

// open opens the listeners. It fails if there is none.
func (ls *listeners) open(ctx context.Context) error {
	if err := ls.Open(ctx); err != nil {
		return err
	}
	ls.limit = newLimit(ls.config.MaxTCPConns, ls.config.Logger)
	if ls.config.Registerer != nil {
		ls.config.Registerer.MustRegister(ls.limit.Metric())
	}
	ls.changed(ls.AddrPorts())
	return nil
}

// serve serves a socket until ctx ends and all queries that were read are answered.
func (ls *listeners) serve(ctx context.Context, socket *listen.Socket) error {
	var l interface {
		serve() error
		stop()
	}
	switch conn := socket.Conn.(type) {
	case *net.UDPConn:
		l = newUDPListener(ls.handler, socket, conn)
	case *net.TCPListener:
		l = newTCPListener(ls.handler, socket, conn, ls.limit)
	}
	defer context.AfterFunc(ctx, l.stop)()
	return l.serve()
}

// changed is called when a listener has been opened, with the addresses of all. It sets the metric of open listeners, and
// gives the forwarder the addresses, because a nameserver there is this agent.
func (ls *listeners) changed(addrs []netip.AddrPort) {
	ls.handler.metrics.listeners.Set(float64(len(addrs)))
	ls.handler.forwarder.SetListeners(addrs)
}
