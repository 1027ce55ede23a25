/* lookup NAME... prints the canonical name and an IPv4 address of each name, as getaddrinfo finds them. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	struct addrinfo hints = {.ai_flags = AI_CANONNAME, .ai_socktype = SOCK_STREAM}, *found;
	while (*++argv)
		if (getaddrinfo(*argv, NULL, &hints, &found))
			puts("none");
		else
			printf("%s %s\n", found->ai_canonname, inet_ntoa(((struct sockaddr_in *)found->ai_addr)->sin_addr));
	return 0;
}
